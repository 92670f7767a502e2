"""The arrays of one learner's fragments, spread over the processes of its job, and how the first asks the others.

A learner may be a torchrun job. Its first rank decides. Each rank owns some fragments: it holds their bases, captures
and error feedback, packs and stores their updates, and fetches and decodes their versions. So the learner's ranks share
its memory, arithmetic and traffic. The first rank never handles arrays of fragments that other ranks own.

arrays     a rank's arrays, by number           protocol   the messages between ranks
server     at a rank that owns: answers         client     at the first rank: a backend that asks
"""
