//! FT, Fourier transform: solves a heat equation on a box, by its three-dimensional Fourier transform. Each iteration
//! advances one step in time and transforms back.
//!
//! Its members own planes of the box, by their third coordinate: they have the data for transforms along the first and
//! the second coordinate. For the third they trade the planes for others, by the second coordinate: every member sends
//! data to every other one. All of the memory but the table of factors is rewritten each iteration.

use std::f64::consts::PI;
use std::ops::Range;

use crate::class::Class;
use crate::exchange::ExchangeError;
use crate::fft::{Complex, Direction, Transform};
use crate::kernel::{Kernel, Verdict, list};
use crate::random::{Random, SEED};
use crate::team::Member;

/// Steps in time.
const ITERATIONS: usize = 6;
/// Heat diffusion coefficient.
const ALPHA: f64 = 1e-6;
/// Relative tolerance, of the specification.
const TOLERANCE: f64 = 1e-12;

/// A problem: a box of random complex numbers.
#[derive(Debug, Clone)]
pub struct Problem {
    /// Points along each coordinate.
    size: [usize; 3],
    seed: u64,
    /// Mean, about, of 1024 points after each step.
    checksums: [Complex; ITERATIONS],
}

impl Problem {
    /// Returns the problem of a class.
    pub fn new(class: Class) -> Self {
        let (size, checksums) = match class {
            Class::S => (
                [64, 64, 64],
                [
                    [5.546_087_004_964e2, 4.845_363_331_978e2],
                    [5.546_385_409_189e2, 4.865_304_269_511e2],
                    [5.546_148_406_171e2, 4.883_910_722_336e2],
                    [5.545_423_607_415e2, 4.901_273_169_046e2],
                    [5.544_255_039_624e2, 4.917_475_857_993e2],
                    [5.542_683_411_902e2, 4.932_597_244_941e2],
                ],
            ),
            Class::W => (
                [128, 128, 32],
                [
                    [5.673_612_178_944e2, 5.293_246_849_175e2],
                    [5.631_436_885_271e2, 5.282_149_986_629e2],
                    [5.594_024_089_970e2, 5.270_996_558_037e2],
                    [5.560_698_047_020e2, 5.260_027_904_925e2],
                    [5.530_898_991_250e2, 5.249_400_845_633e2],
                    [5.504_159_734_538e2, 5.239_212_247_086e2],
                ],
            ),
            Class::A => (
                [256, 256, 128],
                [
                    [5.046_735_008_193e2, 5.114_047_905_510e2],
                    [5.059_412_319_734e2, 5.098_809_666_433e2],
                    [5.069_376_896_287e2, 5.098_144_042_213e2],
                    [5.077_892_868_474e2, 5.101_336_130_759e2],
                    [5.085_233_095_391e2, 5.104_914_655_194e2],
                    [5.091_487_099_959e2, 5.107_917_842_803e2],
                ],
            ),
        };
        Self { size, seed: SEED, checksums: checksums.map(|[re, im]| Complex { re, im }) }
    }

    fn points(&self) -> usize {
        self.size.iter().product()
    }

    /// Returns the initial planes of the box.
    fn start(&self, planes: Range<usize>) -> Vec<Complex> {
        let area = self.size[0] * self.size[1];
        let mut random = Random::at(self.seed, (2 * area * planes.start) as u64);
        (0..area * planes.len()).map(|_| Complex { re: random.draw(), im: random.draw() }).collect()
    }

    /// Returns the factors of each frequency in a step, for planes by the second coordinate.
    fn factors(&self, planes: Range<usize>) -> Vec<f64> {
        // The second half of the frequencies are the negative ones.
        let squares = self.size.map(|size| {
            let square = |place: usize| place.min(size - place).pow(2);
            (0..size).map(square).collect::<Vec<_>>()
        });
        let [xs, ys, zs] = &squares;
        let scale = -4.0 * ALPHA * PI * PI;
        let mut factors = Vec::with_capacity(planes.len() * zs.len() * xs.len());
        for y in &ys[planes] {
            for z in zs {
                factors.extend(xs.iter().map(|x| (scale * (x + y + z) as f64).exp()));
            }
        }
        factors
    }

    /// Returns a member's share of the checksum of the box.
    fn checksum(&self, own: &[Complex], planes: &Range<usize>) -> Complex {
        let [nx, ny, nz] = self.size;
        let points = (1..=1024).map(|point| [point % nx, 3 * point % ny, 5 * point % nz]);
        let own = points
            .filter(|[_, _, z]| planes.contains(z))
            .map(|[x, y, z]| own[((z - planes.start) * ny + y) * nx + x]);
        own.fold(Complex::default(), |sum, point| sum + point) * (1.0 / self.points() as f64)
    }
}

impl Kernel for Problem {
    type Element = Complex;

    fn bytes(&self, _threads: usize, ranks: usize) -> usize {
        // The frequencies, the box in work, the traded blocks, and the factors.
        self.points() * (3 * size_of::<Complex>() + size_of::<f64>()) / ranks
    }

    fn run(&self, member: &Member<'_, Complex>, tick: &mut dyn FnMut(u32)) -> Result<Verdict, ExchangeError> {
        use Direction::{Back, There};
        let [nx, ny, nz] = self.size;
        let planes = member.range(nz);
        let [mut along_x, mut along_y, mut along_z] = self.size.map(Transform::new);
        let mut turn = Turn { width: nx, blocks: vec![Vec::new(); member.parts()] };

        // Planes of the box, or of its frequencies.
        let mut work = self.start(planes.clone());
        for plane in work.chunks_exact_mut(nx * ny) {
            along_x.rows(There, plane);
            along_y.columns(There, plane, nx);
        }
        let factors = self.factors(member.range(ny));
        turn.turn(&mut work, nz, ny, member)?;
        for plane in work.chunks_exact_mut(nx * nz) {
            along_z.columns(There, plane, nx);
        }
        let mut kept = work.clone();

        let mut found = [Complex::default(); ITERATIONS];
        for (iteration, found) in found.iter_mut().enumerate() {
            // It may have had more planes than there are of frequencies here, or fewer.
            work.resize(kept.len(), Complex::default());
            for ((kept, frequency), &factor) in kept.iter_mut().zip(&mut work).zip(&factors) {
                *kept = *kept * factor;
                *frequency = *kept;
            }
            for plane in work.chunks_exact_mut(nx * nz) {
                along_z.columns(Back, plane, nx);
            }
            turn.turn(&mut work, ny, nz, member)?;
            for plane in work.chunks_exact_mut(nx * ny) {
                along_y.columns(Back, plane, nx);
                along_x.rows(Back, plane);
            }
            [*found] = member.sum([self.checksum(&work, &planes)])?;
            tick(iteration as u32 + 1);
        }
        Ok(self.verdict(&found))
    }
}

impl Problem {
    fn verdict(&self, found: &[Complex; ITERATIONS]) -> Verdict {
        let right = |(&found, &expected): (&Complex, &Complex)| {
            (found - expected).norm() / expected.norm() <= TOLERANCE
        };
        let values = |sums: &[Complex]| {
            list(sums.iter().flat_map(|sum| [sum.re, sum.im]).collect::<Vec<_>>().as_slice())
        };
        Verdict {
            verified: found.iter().zip(&self.checksums).all(right),
            found: values(found),
            expected: values(&self.checksums),
        }
    }
}

/// Change of the coordinate by which the members own planes.
struct Turn {
    /// Points of a row, along the first coordinate. Rows stay as they are.
    width: usize,
    /// Memory of the blocks received last, for the blocks sent next.
    blocks: Vec<Vec<Complex>>,
}

impl Turn {
    /// Replaces a member's part of `from_planes` planes of `to_planes` rows in `array` by its part of `to_planes`
    /// planes of `from_planes` rows.
    fn turn(
        &mut self,
        array: &mut Vec<Complex>,
        from_planes: usize,
        to_planes: usize,
        member: &Member<'_, Complex>,
    ) -> Result<(), ExchangeError> {
        let width = self.width;
        for (part, block) in self.blocks.iter_mut().enumerate() {
            let rows = member.range_of(part, to_planes);
            block.clear();
            // Exactly that much memory: all blocks together are as large as the box.
            block.reserve_exact(array.len() / to_planes * rows.len());
            for plane in array.chunks_exact(to_planes * width) {
                block.extend_from_slice(&plane[rows.start * width..rows.end * width]);
            }
        }
        self.blocks = member.trade(std::mem::take(&mut self.blocks))?;
        let own = member.range(to_planes).len();
        array.resize(own * from_planes * width, Complex::default());
        for (part, block) in self.blocks.iter().enumerate() {
            let theirs = member.range_of(part, from_planes);
            if block.len() != theirs.len() * own * width {
                return Err(ExchangeError::Malformed("too much or too little of a box"));
            }
            for (row, block) in theirs.zip(block.chunks_exact(own * width)) {
                for (plane, block) in
                    array.chunks_exact_mut(from_planes * width).zip(block.chunks_exact(width))
                {
                    plane[row * width..(row + 1) * width].copy_from_slice(block);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::{assert_verifies, verdict};
    use crate::team;

    #[test]
    fn verifies() {
        assert_verifies(&Problem::new(Class::S), &[1, 2, 3], 6);
    }

    #[test]
    fn another_box_does_not_verify() {
        let mut problem = Problem::new(Class::S);
        problem.seed += 2;
        assert!(!verdict(&problem, 2, 6).verified);
    }

    #[test]
    fn each_checksum_is_held_against_what_was_found() {
        let problem = Problem::new(Class::S);
        assert!(problem.verdict(&problem.checksums).verified);
        for iteration in 0..ITERATIONS {
            let mut found = problem.checksums;
            found[iteration].im *= 1.0 + 1e-11;
            assert!(!problem.verdict(&found).verified);
            found[iteration].im = f64::NAN;
            assert!(!problem.verdict(&found).verified);
        }
    }

    #[test]
    fn a_turned_box_has_each_row_where_it_belongs() {
        let (rows, planes, width) = (5, 7, 2);
        let point =
            |plane: usize, row: usize, x: usize| Complex { re: (100 * plane + row) as f64, im: x as f64 };
        for threads in [1, 2, 3] {
            team::run(threads, None, |member| {
                let places = |planes: Range<usize>, rows| {
                    planes.flat_map(move |plane| {
                        (0..rows * width).map(move |place| (plane, place / width, place % width))
                    })
                };
                let own = places(member.range(planes), rows);
                let mut array: Vec<_> = own.map(|(plane, row, x)| point(plane, row, x)).collect();
                let own = places(member.range(rows), planes);
                let expected: Vec<_> = own.map(|(row, plane, x)| point(plane, row, x)).collect();
                let mut turn = Turn { width, blocks: vec![Vec::new(); threads] };
                turn.turn(&mut array, planes, rows, member)?;
                assert_eq!(array, expected);
                Ok(())
            })
            .unwrap();
        }
    }
}
