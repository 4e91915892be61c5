"""The verb claims: common claims on ZeRO, each decided by a figure that an experiment gave."""
