"""Conversations: their turns, the chat templates that write them as text, and which text counts."""
