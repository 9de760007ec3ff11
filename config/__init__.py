"""Settings: what they are (`schema`), and where they come from (`load`)."""
