"""What an OpenAI-compatible server must do, checked over HTTP alone: see README.md."""
