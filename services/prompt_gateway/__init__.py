"""The prompt gateway: prompt RPC on TCP, the one-active-prompt rule, prompt runtimes (S1 2.5, 6.9, 7.8, 7.9)."""
