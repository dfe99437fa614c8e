"""PyInstaller: llguidance asks for its own version when it is imported, so its metadata has to be there."""

from PyInstaller.utils.hooks import copy_metadata

datas = copy_metadata("llguidance")
