"""The web page that the server offers: files only, served as they are; see docs/guides/serve.md."""
