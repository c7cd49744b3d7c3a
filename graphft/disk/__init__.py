"""Files that hold the old or the new content whenever the machine stops, and in which a flipped bit is found."""
