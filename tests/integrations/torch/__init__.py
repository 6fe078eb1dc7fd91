"""`heedful.integrations.torch`: torch's own attention by heedful."""
