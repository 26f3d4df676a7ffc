"""The OpenAPI document, its page, and the chat page."""
