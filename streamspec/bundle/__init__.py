"""The bundle and adapter formats: manifests, files, checks of untrusted input."""
