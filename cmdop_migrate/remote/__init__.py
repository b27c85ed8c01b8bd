"""Run cmdop-migrate on other hosts over SSH: the inventory of hosts, host keys, connections, and the peer whose command
line is the API. It may import the base modules; paramiko is imported only here."""
