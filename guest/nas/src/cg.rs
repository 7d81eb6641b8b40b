//! CG, conjugate gradient: the smallest eigenvalue of a large sparse matrix, by the inverse power method, where each
//! step solves a linear system with 25 iterations of the conjugate gradient method.
//!
//! Its members own rows of the matrix and the elements of the vectors that belong to them. The matrix is read over and
//! over and never written; the vector that it is multiplied with is gathered anew each time.

use std::ops::Range;

use crate::class::Class;
use crate::exchange::ExchangeError;
use crate::kernel::{Kernel, Verdict};
use crate::random::{Random, SEED};
use crate::team::Member;

/// Steps of the inverse power method.
const ITERATIONS: u32 = 15;
/// Iterations of the conjugate gradient method in each step.
const STEPS: usize = 25;
/// Lower bound of the matrix's eigenvalues, before the shift.
const CONDITION: f64 = 0.1;
/// Relative tolerance, of the specification.
const TOLERANCE: f64 = 1e-10;

/// A problem: a matrix that random numbers make, and its eigenvalue.
#[derive(Debug, Clone)]
pub struct Problem {
    /// Rows, and columns.
    order: usize,
    /// Nonzeros of each of the random vectors that make the matrix.
    nonzeros: usize,
    shift: f64,
    seed: u64,
    /// The eigenvalue.
    zeta: f64,
}

impl Problem {
    /// Returns the problem of a class.
    pub fn new(class: Class) -> Self {
        let (order, nonzeros, shift, zeta) = match class {
            Class::S => (1400, 7, 10.0, 8.597_177_507_864_8),
            Class::W => (7000, 8, 12.0, 10.362_595_087_124),
            Class::A => (14000, 11, 20.0, 17.130_235_054_029),
        };
        Self { order, nonzeros, shift, seed: SEED, zeta }
    }

    /// Returns the random vectors, sparse: places and values.
    fn vectors(&self) -> Vec<Vec<(usize, f64)>> {
        // The specification draws one number without a use.
        let mut random = Random::at(self.seed, 1);
        let places = self.order.next_power_of_two() as f64;
        let vector = |own: usize| {
            let mut vector: Vec<(usize, f64)> = Vec::with_capacity(self.nonzeros + 1);
            while vector.len() < self.nonzeros {
                let value = random.draw();
                let place = (random.draw() * places) as usize;
                if place < self.order && vector.iter().all(|entry| entry.0 != place) {
                    vector.push((place, value));
                }
            }
            match vector.iter_mut().find(|entry| entry.0 == own) {
                Some(entry) => entry.1 = 0.5,
                None => vector.push((own, 0.5)),
            }
            vector
        };
        (0..self.order).map(vector).collect()
    }

    /// Returns some rows of the matrix: the sum of the outer products of the vectors with themselves, each vector
    /// weighing less than the one before it, and on the diagonal the condition less the shift.
    fn matrix(&self, rows: Range<usize>) -> Matrix {
        let vectors = self.vectors();
        let ratio = CONDITION.powf(1.0 / self.order as f64);
        let mut weight = 1.0;
        let mut contributions: Vec<Vec<(usize, f64)>> = vec![Vec::new(); rows.len()];
        for (index, vector) in vectors.iter().enumerate() {
            for (row, value) in vector.iter().filter(|entry| rows.contains(&entry.0)) {
                contributions[row - rows.start].push((index, value * weight));
            }
            weight *= ratio;
        }
        let mut matrix =
            Matrix { ends: Vec::with_capacity(rows.len()), columns: Vec::new(), values: Vec::new() };
        for (row, contributions) in rows.zip(contributions) {
            let product = |(index, factor): (usize, f64)| {
                vectors[index].iter().map(move |&(column, value)| (column, value * factor))
            };
            let mut entries: Vec<_> = contributions.into_iter().flat_map(product).collect();
            entries.push((row, CONDITION - self.shift));
            entries.sort_by_key(|entry| entry.0);
            for same in entries.chunk_by(|one, other| one.0 == other.0) {
                matrix.columns.push(same[0].0 as u32);
                matrix.values.push(same.iter().map(|entry| entry.1).sum());
            }
            matrix.ends.push(matrix.columns.len());
        }
        matrix
    }

    /// Computes the eigenvalue with the inverse power method.
    fn eigenvalue(
        &self,
        matrix: &Matrix,
        member: &Member<'_, f64>,
        tick: &mut dyn FnMut(u32),
    ) -> Result<Verdict, ExchangeError> {
        let mut x = vec![1.0; member.range(self.order).len()];
        let (mut zeta, mut residual) = (0.0, 0.0);
        for iteration in 1..=ITERATIONS {
            let (z, norm) = self.solve(matrix, &x, member)?;
            residual = norm;
            let [product, square] = member.sum([dot(&x, &z), dot(&z, &z)])?;
            zeta = self.shift + 1.0 / product;
            let scale = 1.0 / square.sqrt();
            x.iter_mut().zip(&z).for_each(|(x, z)| *x = scale * z);
            tick(iteration);
        }
        let mut verdict = Verdict::of(&[zeta], &[self.zeta], TOLERANCE);
        // The specification computes the residual and compares it with nothing.
        verdict.found = format!("{},residual:{residual:e}", verdict.found);
        Ok(verdict)
    }

    /// Solves A z = x approximately with the conjugate gradient method. Returns z and the norm of x - A z.
    #[expect(clippy::many_single_char_names, reason = "the names of the specification")]
    fn solve(
        &self,
        matrix: &Matrix,
        x: &[f64],
        member: &Member<'_, f64>,
    ) -> Result<(Vec<f64>, f64), ExchangeError> {
        let mut z = vec![0.0; x.len()];
        let mut q = vec![0.0; x.len()];
        let mut r = x.to_vec();
        let mut p = x.to_vec();
        let [mut rho] = member.sum([dot(&r, &r)])?;
        for _ in 0..STEPS {
            matrix.multiply(&member.gather(p.clone(), self.order)?, &mut q);
            let [curvature] = member.sum([dot(&p, &q)])?;
            let alpha = rho / curvature;
            z.iter_mut().zip(&p).for_each(|(z, p)| *z += alpha * p);
            r.iter_mut().zip(&q).for_each(|(r, q)| *r -= alpha * q);
            let rho_before = rho;
            [rho] = member.sum([dot(&r, &r)])?;
            let beta = rho / rho_before;
            p.iter_mut().zip(&r).for_each(|(p, r)| *p = r + beta * *p);
        }
        matrix.multiply(&member.gather(z.clone(), self.order)?, &mut q);
        let [square] = member.sum([x.iter().zip(&q).map(|(x, q)| (x - q) * (x - q)).sum()])?;
        Ok((z, square.sqrt()))
    }
}

impl Kernel for Problem {
    type Element = f64;

    fn bytes(&self, _threads: usize, ranks: usize) -> usize {
        // The products of a vector with itself rarely fall on those of another.
        let entries = self.order * (self.nonzeros + 1).pow(2);
        (entries * (size_of::<f64>() + size_of::<u32>()) + 6 * self.order * size_of::<f64>()) / ranks
    }

    fn run(&self, member: &Member<'_, f64>, tick: &mut dyn FnMut(u32)) -> Result<Verdict, ExchangeError> {
        let matrix = self.matrix(member.range(self.order));
        self.eigenvalue(&matrix, member, tick)
    }
}

/// Rows of a sparse matrix.
#[derive(Debug)]
struct Matrix {
    /// The end of each row in the arrays below.
    ends: Vec<usize>,
    columns: Vec<u32>,
    values: Vec<f64>,
}

impl Matrix {
    fn multiply(&self, vector: &[f64], product: &mut [f64]) {
        let mut start = 0;
        for (product, &end) in product.iter_mut().zip(&self.ends) {
            let entries = self.columns[start..end].iter().zip(&self.values[start..end]);
            *product = entries.map(|(&column, value)| value * vector[column as usize]).sum();
            start = end;
        }
    }
}

fn dot(one: &[f64], other: &[f64]) -> f64 {
    one.iter().zip(other).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::{assert_verifies, verdict};
    use crate::team;

    #[test]
    fn verifies() {
        assert_verifies(&Problem::new(Class::S), &[1, 2, 3], ITERATIONS);
    }

    #[test]
    fn another_matrix_does_not_verify() {
        let mut problem = Problem::new(Class::S);
        problem.seed += 2;
        assert!(!verdict(&problem, 2, ITERATIONS).verified);
    }

    #[test]
    fn one_disturbed_element_does_not_verify() {
        let problem = Problem::new(Class::S);
        let verdict = |disturbance: f64| {
            team::run(1, None, |member| {
                let mut matrix = problem.matrix(0..problem.order);
                matrix.values[30_000] += disturbance;
                problem.eigenvalue(&matrix, member, &mut |_| ())
            })
        };
        assert!(verdict(0.0).unwrap().verified);
        assert!(!verdict(1e-3).unwrap().verified);
    }

    #[test]
    fn the_parts_of_the_matrix_are_those_of_the_whole() {
        let problem = Problem::new(Class::S);
        let whole = problem.matrix(0..problem.order);
        let part = problem.matrix(700..problem.order);
        let start = whole.ends[699];
        assert_eq!(part.columns, whole.columns[start..]);
        assert_eq!(part.values, whole.values[start..]);
        assert_eq!(part.ends.len(), 700);
    }
}
