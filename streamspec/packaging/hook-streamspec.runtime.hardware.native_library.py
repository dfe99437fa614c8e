"""PyInstaller: the library of native operators, where it was built, lies beside the package's modules as installed."""

from streamspec.runtime.hardware.native_library import place

binaries = [(str(place()), "streamspec")] if place().is_file() else []
