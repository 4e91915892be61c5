"""Which code is this? A hash of the package's sources, to compare runs and machines by."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def sources_hash() -> str:
    """Hash the sources as they are on disk when this process first asks."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
