//! MG, multigrid: solves a Poisson equation on a cube with periodic borders, by V-cycles over grids of all sizes.
//!
//! Its members own slabs of planes of every grid that has enough planes for all, and trade the planes at the borders
//! after each operation. The grids below that are so small that each member has them as a whole and does the same work
//! on them as the others.

use std::ops::Range;

use crate::class::Class;
use crate::exchange::ExchangeError;
use crate::grid::{Grid, Weights};
use crate::kernel::{Kernel, Verdict};
use crate::random::{Random, SEED};
use crate::team::Member;

/// V-cycles.
const ITERATIONS: u32 = 4;
/// Charges of each sign.
const CHARGES: usize = 10;
/// Operator of the residual: the operator of the equation, negated.
const RESIDUAL: Weights = [8.0 / 3.0, 0.0, -1.0 / 6.0, -1.0 / 12.0];
/// About the inverse of that operator, for the classes up to A.
const SMOOTHER: Weights = [-3.0 / 8.0, 1.0 / 32.0, -1.0 / 64.0, 0.0];
/// Weights from a grid to one half as fine.
const RESTRICTION: Weights = [1.0 / 2.0, 1.0 / 4.0, 1.0 / 8.0, 1.0 / 16.0];
/// Relative tolerance, of the specification.
const TOLERANCE: f64 = 1e-8;

/// A problem: a cube with charges in it.
#[derive(Debug, Clone)]
pub struct Problem {
    /// The finest grid has 2ˡᵉᵛᵉˡˢ points a side, the coarsest 2.
    levels: u32,
    seed: u64,
    /// Final norm of the residual.
    norm: f64,
}

impl Problem {
    /// Returns the problem of a class.
    pub fn new(class: Class) -> Self {
        let (levels, norm) = match class {
            Class::S => (5, 0.530_770_700_573_4e-4),
            Class::W => (7, 0.646_732_937_533_9e-5),
            Class::A => (8, 0.243_336_530_906_9e-5),
        };
        Self { levels, seed: SEED, norm }
    }

    /// Returns the points of the finest grid, a side.
    fn side(&self) -> usize {
        1 << self.levels
    }

    /// Returns a member's planes of the finest grid with the charges in them: 1 at the places of the greatest of one
    /// random number for each point, -1 at those of the least.
    fn charges(&self, planes: Range<usize>, member: &Member<'_, f64>) -> Result<Grid, ExchangeError> {
        let n = self.side();
        let mut random = Random::at(self.seed, (planes.start * n * n) as u64);
        let (mut least, mut greatest) = (Least::default(), Least::default());
        for place in planes.start * n * n..planes.end * n * n {
            let number = random.draw();
            least.offer([number, place as f64]);
            greatest.offer([-number, place as f64]);
        }
        // A member's candidates are those of its own planes.
        let own = [least.0, greatest.0].as_flattened().as_flattened().to_vec();
        let all = member.gather(own, 4 * CHARGES * member.parts())?;
        let (mut least, mut greatest) = (Least::default(), Least::default());
        for candidates in all.as_chunks::<2>().0.chunks_exact(2 * CHARGES) {
            let (small, great) = candidates.split_at(CHARGES);
            for (best, candidates) in [(&mut least, small), (&mut greatest, great)] {
                for &candidate in candidates {
                    best.offer(candidate);
                }
            }
        }
        let mut grid = Grid::new(n, planes);
        for (Least(found), charge) in [(least, -1.0), (greatest, 1.0)] {
            for [_, place] in found {
                let place = place as usize;
                grid.set([place % n, place / n % n, place / (n * n)], charge);
            }
        }
        grid.close(member)?;
        Ok(grid)
    }
}

impl Kernel for Problem {
    type Element = f64;

    fn bytes(&self, _threads: usize, ranks: usize) -> usize {
        let grid = |level: u32| ((1_usize << level) + 2).pow(3);
        // The charges on the finest grid, the solution and the residual on all.
        let points = grid(self.levels) + 2 * (1..=self.levels).map(grid).sum::<usize>();
        points * size_of::<f64>() / ranks
    }

    fn run(&self, member: &Member<'_, f64>, tick: &mut dyn FnMut(u32)) -> Result<Verdict, ExchangeError> {
        let mut cycle = Cycle::new(self.levels, member);
        let charges = self.charges(cycle.finest_planes(), member)?;
        cycle.assess(&charges, member)?;
        for iteration in 1..=ITERATIONS {
            cycle.down(member)?;
            cycle.up(&charges, member)?;
            cycle.assess(&charges, member)?;
            tick(iteration);
        }
        let [square] = member.sum([cycle.finest().residual.square()])?;
        let norm = (square / self.side().pow(3) as f64).sqrt();
        Ok(Verdict::of(&[norm], &[self.norm], TOLERANCE))
    }
}

/// The least of the offered numbers, in order, each with its place.
struct Least([[f64; 2]; CHARGES]);

impl Default for Least {
    fn default() -> Self {
        Self([[f64::INFINITY, 0.0]; CHARGES])
    }
}

impl Least {
    fn offer(&mut self, candidate: [f64; 2]) {
        if candidate[0] < self.0[CHARGES - 1][0] {
            self.0[CHARGES - 1] = candidate;
            self.0.sort_by(|one, other| one[0].total_cmp(&other[0]));
        }
    }
}

/// One of the grids.
struct Level {
    solution: Grid,
    residual: Grid,
}

/// A member's share of all grids.
struct Cycle {
    /// Grids from the coarsest one, of 2 points a side, to the finest.
    levels: Vec<Level>,
    /// Index of the finest grid that each member has as a whole.
    whole: usize,
    /// A member's part of the residual on that grid, before the parts are merged.
    part: Grid,
}

impl Cycle {
    fn new(levels: u32, member: &Member<'_, f64>) -> Self {
        // The coarsest grid that has a plane for each member.
        let whole = member.parts().next_power_of_two().ilog2().max(1);
        let part = member.range(1 << whole);
        let level = |level: u32| {
            // A part has twice as many planes on the next finer grid: corresponding planes are with the same member.
            let planes = match level.checked_sub(whole) {
                None | Some(0) => 0..1 << level,
                Some(finer) => part.start << finer..part.end << finer,
            };
            let grid = || Grid::new(1 << level, planes.clone());
            Level { solution: grid(), residual: grid() }
        };
        let levels = (1..=levels).map(level).collect();
        Self { levels, whole: whole as usize - 1, part: Grid::new(1 << whole, part.clone()) }
    }

    fn finest(&mut self) -> &mut Level {
        let finest = self.levels.len() - 1;
        &mut self.levels[finest]
    }

    fn finest_planes(&mut self) -> Range<usize> {
        self.finest().residual.planes()
    }

    /// Computes the residual of the solution on the finest grid.
    fn assess(&mut self, charges: &Grid, member: &Member<'_, f64>) -> Result<(), ExchangeError> {
        let Level { solution, residual } = self.finest();
        residual.set_to_sum(charges, RESIDUAL, solution, member)
    }

    /// Restricts the residual from the finest grid down to the coarsest.
    fn down(&mut self, member: &Member<'_, f64>) -> Result<(), ExchangeError> {
        for coarse in (0..self.levels.len() - 1).rev() {
            let (coarser, finer) = self.levels.split_at_mut(coarse + 1);
            let (residual, fine) = (&mut coarser[coarse].residual, &finer[0].residual);
            if coarse == self.whole {
                self.part.restrict(RESTRICTION, fine, member)?;
                let whole = member.gather(self.part.own().to_vec(), residual.own().len())?;
                residual.replace(&whole);
            } else {
                residual.restrict(RESTRICTION, fine, member)?;
            }
        }
        Ok(())
    }

    /// Corrects the solution on each grid by the one on the grid before it, and smooths it.
    fn up(&mut self, charges: &Grid, member: &Member<'_, f64>) -> Result<(), ExchangeError> {
        let finest = self.levels.len() - 1;
        for index in 0..=finest {
            let (coarser, finer) = self.levels.split_at_mut(index);
            let Level { solution, residual } = &mut finer[0];
            // Only the finest one is kept from cycle to cycle.
            if index < finest {
                solution.clear();
            }
            if let Some(coarse) = coarser.last() {
                solution.interpolate(&coarse.solution);
                if index < finest {
                    residual.add(RESIDUAL, solution, member)?;
                } else {
                    residual.set_to_sum(charges, RESIDUAL, solution, member)?;
                }
            }
            solution.add(SMOOTHER, residual, member)?;
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
        assert_verifies(&Problem::new(Class::S), &[1, 2, 3, 16], ITERATIONS);
    }

    #[test]
    fn other_charges_do_not_verify() {
        let mut problem = Problem::new(Class::S);
        problem.seed += 2;
        assert!(!verdict(&problem, 2, ITERATIONS).verified);
    }

    #[test]
    fn one_disturbed_point_does_not_verify() {
        let problem = Problem::new(Class::S);
        for (disturbance, verified) in [(0.0, true), (0.1, false)] {
            let norm = team::run(1, None, |member| {
                let mut cycle = Cycle::new(problem.levels, member);
                let mut charges = problem.charges(cycle.finest_planes(), member)?;
                charges.add([disturbance, 0.0, 0.0, 0.0], &one_point(), member)?;
                cycle.assess(&charges, member)?;
                for _ in 0..ITERATIONS {
                    cycle.down(member)?;
                    cycle.up(&charges, member)?;
                    cycle.assess(&charges, member)?;
                }
                Ok((cycle.finest().residual.square() / 32.0_f64.powi(3)).sqrt())
            });
            assert_eq!(Verdict::of(&[norm.unwrap()], &[problem.norm], TOLERANCE).verified, verified);
        }
    }

    /// Returns a grid with one point.
    fn one_point() -> Grid {
        let mut grid = Grid::new(32, 0..32);
        grid.set([3, 4, 5], 1.0);
        grid
    }

    #[test]
    fn the_least_are_kept_in_order() {
        let mut least = Least::default();
        (0..100).for_each(|n| least.offer([f64::from(n * 37 % 100), f64::from(n)]));
        let found = least.0.map(|[number, _]| number as u32);
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }
}
