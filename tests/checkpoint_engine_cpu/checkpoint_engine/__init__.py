"""The installed package checkpoint-engine, for an engine on CPU: only what asks for a device is replaced (device_utils.py)."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
