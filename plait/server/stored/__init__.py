"""The endpoints of what is stored: responses, chats, files and batches."""
