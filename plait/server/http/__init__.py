"""HTTP itself: connections, bodies, events, TLS, errors."""
