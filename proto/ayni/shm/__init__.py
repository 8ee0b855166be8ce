"""Memory that processes of one user on one host read in place, and the sockets that they get it through."""
