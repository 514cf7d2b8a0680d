"""What the vendor's own client sees of a server: run in its environment, `vendor_calls.py URL KEY`; prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from vastai import VastAI


def main() -> None:
    """Every call that the provider makes by REST, made by the vendor's code."""
    url, key = sys.argv[1:]
    client = VastAI(api_key=key, server_url=url, retry=1)
    seen: dict[str, Any] = {}
    seen["user"] = client.show_user()
    client.create_ssh_key(ssh_key="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl x")
    seen["keys"] = client.show_ssh_keys()
    seen["offers"] = client.search_offers(query="gpu_name=RTX_4090 dph_total<0.35 inet_down>500", order="dph_total")
    offer = seen["offers"][0]["id"]
    seen["created"] = client.create_instance(
        id=offer, image="nvidia/cuda:12.6.3-devel-ubuntu24.04", disk=40, label="smq-vendor", env={"A": "1"}, ssh=True
    )
    instance = seen["created"]["new_contract"]
    seen["first"] = client.show_instance(id=instance)
    seen["running"] = client.show_instance(id=instance)
    seen["ssh_url"] = client.ssh_url(id=instance)
    client.label_instance(id=instance, label="smq-vendor-2")
    seen["listed"] = client.show_instances()
    seen["logs"] = client.logs(instance_id=instance)
    seen["destroyed"] = client.destroy_instance(id=instance)
    seen["afterwards"] = client.show_instance(id=instance)
    seen["left"] = [row["id"] for row in client.show_instances()]
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
