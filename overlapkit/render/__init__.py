"""Plans, pages and presets in the forms that people and programs read."""
