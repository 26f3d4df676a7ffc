"""How fast a model and its ops are here, checked before it is said: what `plait bench` stands on."""
