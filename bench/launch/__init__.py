"""Starting and stopping servers, ours and others', from one line of text each."""

from bench.launch.command import Setup, command_for
from bench.launch.peer import Peer, parse_peer
from bench.launch.process import ServerProcess, free_port, start_all

__all__ = ["Peer", "ServerProcess", "Setup", "command_for", "free_port", "parse_peer", "start_all"]
