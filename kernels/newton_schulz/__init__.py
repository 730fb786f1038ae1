"""Orthogonalisation of matrices: the iteration of Muon."""
