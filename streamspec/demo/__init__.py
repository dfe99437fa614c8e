"""streamspec.demo: the whole loop on the reference base and a shipped SQL adapter, with a table and a plot at its
end.
"""

from streamspec.demo.run import demo

__all__ = ["demo"]
