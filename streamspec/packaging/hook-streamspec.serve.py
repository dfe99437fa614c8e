"""PyInstaller: who serves has the web page too, which lies in a package of its own; where that is not installed,
nothing.
"""

from PyInstaller.utils.hooks import collect_data_files

datas = collect_data_files("streamspec.serve")
