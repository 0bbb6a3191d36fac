"""To be documented below."""
