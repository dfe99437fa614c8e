"""Further APIs over the path of chats: each translates requests and answers, and registers its routes."""
