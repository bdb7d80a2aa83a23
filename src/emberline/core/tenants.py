"""The header with which a gateway separates its callers at an engine or router.

All callers of a gateway use the engine with the same API key, or with none. The header's value is added to that key, so
it can only divide the tenant of the key: cached prompts, stored responses and resumable streams are not shared between
requests with different values.
"""

from __future__ import annotations

TENANT_SALT_HEADER = "x-emberline-tenant-salt"
