//! The five kernels of the NAS Parallel Benchmarks (NPB 3, classes S, W and A), written from the specification, as a
//! load for virtual machines during a migration: each verifies its own result, so a lost page is detected.
//!
//! | kernel | work | verified result |
//! | --- | --- | --- |
//! | [`ep`] | Gaussian pairs from random numbers: computes, hardly touches memory | sums of the deviates, number of pairs |
//! | [`cg`] | smallest eigenvalue of a sparse matrix: reads memory at random | the eigenvalue |
//! | [`is`] | ranks integer keys: rewrites memory in bulk | ranks of five keys each iteration; at the end that all are sorted |
//! | [`mg`] | multigrid on a cube: sweeps over grids of all sizes | norm of the residual |
//! | [`ft`] | a heat equation by 3-D FFT: rewrites all of its memory each iteration | a checksum each iteration |
//!
//! # Division of the work
//!
//! One parallel region, static distribution: the members of a [`team`] each own a part of the data, fixed for the run,
//! and meet in collective operations. The members are threads. In the variant for two virtual machines they are the
//! threads of two processes, and data between the processes goes over TCP ([`exchange`]), as in an MPI program. All
//! five kernels do both, with one code:
//!
//! | kernel | data between two processes |
//! | --- | --- |
//! | EP | sums, sixteen times in a run |
//! | CG | half of a vector and two sums, 25 times an iteration |
//! | IS | half of the keys each iteration, after counts of their destinations |
//! | MG | planes at the borders after every operation on every grid; the coarsest grid as a whole |
//! | FT | half of the grid each iteration (its transposition), and the checksum |
//!
//! # Differences to the reference programs
//!
//! - A run is a whole program of theirs: its time includes the setup and the verification. There is no first iteration
//!   that does not count.
//! - Random numbers are exact integers ([`random`]); the reference computes the same ones in floating point.
//! - Sums are added in the order of the members: the same members give the same bits, on both sides.
//! - EP has no iterations; here a sixteenth of its work is one.

pub mod cg;
pub mod class;
pub mod ep;
pub mod exchange;
pub mod fft;
pub mod ft;
mod grid;
pub mod is;
pub mod kernel;
pub mod mg;
pub mod random;
pub mod team;
