"""The HTTP front: OpenAI's API as a client of the prompt RPC (design.md 4). asyncio lives here, not in the gateway."""
