//! Complex numbers, and the Fourier transform of many lines at once.

use std::f64::consts::PI;
use std::ops::{Add, Mul, Sub};

use crate::exchange::Element;

/// Lines transformed together. They are stored side by side, so that each operation is done to all at a time; as few as
/// this needs, to save cache.
const LINES: usize = 16;

/// A complex number.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Complex {
    /// Real part.
    pub re: f64,
    /// Imaginary part.
    pub im: f64,
}

impl Complex {
    /// Returns e to the power of i times this angle.
    fn turn(angle: f64) -> Self {
        Self { re: angle.cos(), im: angle.sin() }
    }

    fn conjugate(self) -> Self {
        Self { re: self.re, im: -self.im }
    }

    /// Returns the absolute value.
    pub fn norm(self) -> f64 {
        self.re.hypot(self.im)
    }
}

impl Add for Complex {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { re: self.re + other.re, im: self.im + other.im }
    }
}

impl Sub for Complex {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { re: self.re - other.re, im: self.im - other.im }
    }
}

impl Mul for Complex {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self { re: self.re * other.re - self.im * other.im, im: self.re * other.im + self.im * other.re }
    }
}

impl Mul<f64> for Complex {
    type Output = Self;

    fn mul(self, factor: f64) -> Self {
        Self { re: self.re * factor, im: self.im * factor }
    }
}

impl Element for Complex {
    const BYTES: usize = 2 * f64::BYTES;

    fn put(self, bytes: &mut Vec<u8>) {
        self.re.put(bytes);
        self.im.put(bytes);
    }

    fn take(bytes: &[u8]) -> Self {
        let (re, im) = bytes.split_at(f64::BYTES);
        Self { re: f64::take(re), im: f64::take(im) }
    }
}

/// Direction of a transform. Both directions in turn multiply by the length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To frequencies.
    There,
    /// From frequencies.
    Back,
}

/// The transform of lines of one length.
#[derive(Debug)]
pub struct Transform {
    length: usize,
    /// Roots of unity of half the circle.
    roots: Vec<Complex>,
    /// Lines side by side: the first elements of all of them, the second ones, and so on.
    lines: Vec<Complex>,
    /// Results of the next step.
    next: Vec<Complex>,
}

impl Transform {
    /// Makes a transform; `length` is a power of two.
    pub fn new(length: usize) -> Self {
        let half = length / 2;
        let roots = (0..half).map(|index| Complex::turn(PI * index as f64 / half as f64)).collect();
        let lines = vec![Complex::default(); length * LINES];
        Self { length, roots, next: lines.clone(), lines }
    }

    /// Transforms the rows of a plane, which are of this length; their number is a multiple of 16.
    pub fn rows(&mut self, direction: Direction, plane: &mut [Complex]) {
        for rows in plane.chunks_exact_mut(LINES * self.length) {
            for (line, row) in rows.chunks_exact(self.length).enumerate() {
                let own = self.lines[line..].iter_mut().step_by(LINES);
                own.zip(row).for_each(|(own, &element)| *own = element);
            }
            self.transform(direction);
            for (line, row) in rows.chunks_exact_mut(self.length).enumerate() {
                let own = self.lines[line..].iter().step_by(LINES);
                own.zip(row).for_each(|(&own, element)| *element = own);
            }
        }
    }

    /// Transforms the columns of a plane. Their number `width` is a multiple of 16. The number of rows is this length.
    pub fn columns(&mut self, direction: Direction, plane: &mut [Complex], width: usize) {
        for first in (0..width).step_by(LINES) {
            let columns = first..first + LINES;
            for (own, row) in self.lines.chunks_exact_mut(LINES).zip(plane.chunks_exact(width)) {
                own.copy_from_slice(&row[columns.clone()]);
            }
            self.transform(direction);
            for (own, row) in self.lines.chunks_exact(LINES).zip(plane.chunks_exact_mut(width)) {
                row[columns.clone()].copy_from_slice(own);
            }
        }
    }

    /// Transforms with Stockham's method: each step leaves the elements in the order that the next one needs, the last
    /// one in that of the frequencies.
    fn transform(&mut self, direction: Direction) {
        let mut run = 1;
        while run < self.length {
            let size = run * LINES;
            let (low, high) = self.lines.split_at(self.lines.len() / 2);
            let pairs = low.chunks_exact(size).zip(high.chunks_exact(size));
            let roots = self.roots.iter().step_by(run);
            for ((next, (low, high)), &root) in self.next.chunks_exact_mut(2 * size).zip(pairs).zip(roots) {
                let root = if direction == Direction::There { root } else { root.conjugate() };
                let (sums, differences) = next.split_at_mut(size);
                let outputs = sums.iter_mut().zip(differences);
                for ((sum, difference), (&one, &other)) in outputs.zip(low.iter().zip(high)) {
                    *sum = one + other;
                    *difference = root * (one - other);
                }
            }
            std::mem::swap(&mut self.lines, &mut self.next);
            run *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a plane of 32 × 32 of no order.
    fn plane() -> Vec<Complex> {
        (0..1024).map(|n| Complex { re: f64::from(n * 37 % 101), im: f64::from(n * 53 % 97) }).collect()
    }

    /// Computes the transform by its definition.
    fn slowly(line: &[Complex]) -> Vec<Complex> {
        let term = |place: usize, (index, &element): (usize, &Complex)| {
            element * Complex::turn(2.0 * PI * (place * index % line.len()) as f64 / line.len() as f64)
        };
        let sum = |place| {
            line.iter().enumerate().map(|entry| term(place, entry)).fold(Complex::default(), Add::add)
        };
        (0..line.len()).map(sum).collect()
    }

    fn near(one: &[Complex], other: &[Complex]) -> bool {
        one.len() == other.len() && one.iter().zip(other).all(|(&a, &b)| (a - b).norm() < 1e-9)
    }

    #[test]
    fn rows_become_what_the_definition_says() {
        let mut fast = plane();
        Transform::new(32).rows(Direction::There, &mut fast);
        for (fast, line) in fast.chunks(32).zip(plane().chunks(32)) {
            assert!(near(fast, &slowly(line)));
        }
    }

    #[test]
    fn columns_become_what_rows_become() {
        let turned = |plane: &[Complex]| -> Vec<Complex> {
            (0..1024).map(|place| plane[place % 32 * 32 + place / 32]).collect()
        };
        let (mut by_rows, mut by_columns) = (plane(), turned(&plane()));
        let mut transform = Transform::new(32);
        transform.rows(Direction::There, &mut by_rows);
        transform.columns(Direction::There, &mut by_columns, 32);
        assert_eq!(turned(&by_columns), by_rows);
    }

    #[test]
    fn there_and_back_again() {
        let mut moved = plane();
        let mut transform = Transform::new(32);
        transform.rows(Direction::There, &mut moved);
        assert!(!near(&moved, &plane()));
        transform.rows(Direction::Back, &mut moved);
        let scaled: Vec<_> = moved.iter().map(|&element| element * (1.0 / 32.0)).collect();
        assert!(near(&scaled, &plane()));
    }

    #[test]
    fn complex_numbers_cross_as_they_are() {
        let number = Complex { re: 1.5, im: -0.1 };
        let mut bytes = Vec::new();
        number.put(&mut bytes);
        assert_eq!((bytes.len(), Complex::take(&bytes)), (Complex::BYTES, number));
    }
}
