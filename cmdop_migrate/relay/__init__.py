"""Connect clients to the host where a session runs now, without reading what they exchange.

Owns the relay protocol (frames, credentials, end-to-end encryption), the server with its router and web page, and the
client side of a relay connection. Imports `lease`, `util` and what is below them; knows neither sessions nor hosts'
records, which `gateway` brings together with it.
"""
