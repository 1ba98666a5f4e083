"""Ranges of objects in S3 by obstore, where that is installed: s3fs takes nearly twice the time, with Python's lock.

Endpoint, region and credentials are those that s3fs has found. What goes wrong here is for s3fs to judge, and for a
while everything is: at once, or after a pause where the store asks for fewer requests or says that it is away.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from typing import Any

REST_SECONDS = 30.0
"""Seconds for which everything is left to s3fs where something went wrong."""

KNOWN_OPTIONS = {"anon", "endpoint_url", "key", "secret", "token", "use_listings_cache"}
"""Options of s3fs of which obstore gets all that it needs."""

_AWAY = re.compile(r"status code: (408|429|5\d\d)")

_rests_until = 0.0
"""Time on the monotonic clock until which everything is left to s3fs."""

_stores: dict[str, tuple[Any, Any]] = {}
"""Bucket -> what its store was made with, and the store."""


async def read_range(filesystem: Any, path: str, start: int, stop: int) -> Any:
    """Read a range of the object `bucket/key` of s3fs; None where s3fs has to read it. Runs in the loop of s3fs.

    Raises OSError where the store is away for now.
    """
    if time.monotonic() < _rests_until or not is_plain_s3(filesystem):
        return None
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError:
        leave_to_s3fs(math.inf)
        return None
    client = await filesystem.set_session()
    credentials = client._request_signer._credentials
    keys = await credentials.get_frozen_credentials() if credentials else ()
    made_with = str(client.meta.endpoint_url), client.meta.region_name, keys
    bucket, _, key = path.partition("/")
    try:
        if bucket not in _stores or _stores[bucket][0] != made_with:
            _stores[bucket] = made_with, _make_store(obstore.store.S3Store, bucket, *made_with)
        return await obstore.get_range_async(_stores[bucket][1], key, start=start, end=stop)
    except FileNotFoundError:
        return None
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        leave_to_s3fs(REST_SECONDS)
        if _AWAY.search(str(error)):
            raise OSError(errno.EBUSY, str(error).partition("\n")[0], path) from error
        return None


def leave_to_s3fs(seconds: float) -> None:
    """Leave everything to s3fs for so long: obstore has failed, or has not answered."""
    global _rests_until
    _rests_until = max(_rests_until, time.monotonic() + seconds)


# The threads of obstore stay behind when a process forks: the child would wait for them.
os.register_at_fork(after_in_child=lambda: leave_to_s3fs(math.inf if _stores else 0))


def is_plain_s3(filesystem: Any) -> bool:
    """Tell whether a file system is s3fs, and nothing was asked of it but what obstore does as well."""
    # Certificates of one's own are known to obstore by the second of these variables alone.
    bundles = {os.environ.get(name) for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE")}
    is_s3 = type(filesystem).__module__ == "s3fs.core"
    return is_s3 and filesystem.storage_options.keys() <= KNOWN_OPTIONS and len(bundles) == 1


def _make_store(kind: Any, bucket: str, endpoint: str, region: str, keys: Any) -> Any:
    """Make the store of a bucket; `keys`: credentials as botocore gives them, empty for nobody's."""
    names = ("access_key_id", "secret_access_key", "session_token")
    return kind(
        bucket,
        endpoint=endpoint,
        region=region,
        skip_signature=not keys,
        virtual_hosted_style_request=False,
        client_options={"allow_http": endpoint.startswith("http://"), "timeout": "120s"},
        retry_config={"max_retries": 0},
        **{name: value for name, value in zip(names, keys, strict=False) if value},
    )
