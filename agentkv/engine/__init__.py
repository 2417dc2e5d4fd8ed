"""The loop: verbs in, steps, answers out. One thread inside, asyncio at the edge."""
