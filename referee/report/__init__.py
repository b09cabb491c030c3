"""What people and programs read of a run: printed tables, JSON, Markdown, pictures."""
