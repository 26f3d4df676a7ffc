"""Small random models with every mixer that Plait has, for `plait verify --certificate`."""
