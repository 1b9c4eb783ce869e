"""Authentication and limits of the controller's port: tokens, TLS, rate limits and connection admission."""
