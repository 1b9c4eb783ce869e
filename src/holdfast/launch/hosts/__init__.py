"""The target `hosts`: machines that are reached over ssh, one node each."""
