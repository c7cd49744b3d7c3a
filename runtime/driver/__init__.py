"""`graphft.Trainer`: a script that trains epoch by epoch, and looks at its model in between."""
