"""PyInstaller: an application that serves takes the web page along, where its package is installed."""

from PyInstaller.utils.hooks import collect_data_files

datas = collect_data_files("streamspec.serve")
