"""The arrays of one learner's fragments, spread over the processes of its job, and how one of them asks the others.

A learner may be a torchrun job. Its first rank decides; each rank owns some fragments: it holds their base, what is
captured of them and their error feedback, packs and stores their updates, fetches and decodes their versions. So the
memory, the arithmetic and the bytes of a learner are shared by its ranks, and nothing of an array passes through the
first one that does not own it.

arrays     what a rank holds, by number     protocol   what ranks say to one another
server     of a rank that owns: answers     client     of the first rank: a backend that asks
"""
