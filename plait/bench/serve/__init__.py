"""`plait bench serve`: a load on running servers, and what clients saw."""
