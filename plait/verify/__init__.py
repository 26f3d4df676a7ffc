"""`plait verify`: whether a reply depends on anything but its request."""
