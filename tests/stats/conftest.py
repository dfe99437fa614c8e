from tests.runtime.conftest import bundles

__all__ = ["bundles"]
