"""host:port of the prompt RPC: reading it, and who may be reached through it (design.md 6 row 34). Pure."""

from __future__ import annotations

import ipaddress


def split_addr(addr: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6]:port". Raises ValueError with a sentence."""
    host, colon, port = addr.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"'{addr}' is not HOST:PORT")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"'{addr}' has no port number from 0 to 65535")
    return host, int(port)


def join_addr(host: str, port: int) -> str:
    """The reverse of split_addr."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def checked_bind(addr: str, *, allow_remote: bool) -> tuple[str, int]:
    """The literal IP address and port to bind. Raises ValueError with a sentence naming the way out.

    No names beside localhost: to resolve one could block the loop (S1 9.14), and could turn into any address.
    """
    host, port = split_addr(addr)
    if host == "localhost":
        return "127.0.0.1", port
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"'{host}' is neither an IP address nor localhost; set [prompt] rpc_addr to one") from None
    if not ip.is_loopback and not allow_remote:
        raise ValueError(
            f"{host} is reachable from other machines and the prompt RPC knows no passwords; "
            "set [prompt] allow_remote = true if that is wanted, or bind 127.0.0.1"
        )
    return str(ip), port
