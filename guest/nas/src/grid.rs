//! Cubic grids with periodic borders, or planes of them, and the operators of MG on them.

use std::ops::Range;

use crate::exchange::ExchangeError;
use crate::team::Member;

/// Weights of a 27-point operator: of the point itself, of those that share a face with it, an edge, a corner.
pub(crate) type Weights = [f64; 4];

/// Some planes of a grid of `n` × `n` × `n` points, with a copy of their neighbours on every side.
///
/// So a plane has n + 2 rows of n + 2 points, and there are two planes more than its own. All planes together are one
/// member's whole grid; fewer are its part of a grid that all members share.
#[derive(Debug)]
pub(crate) struct Grid {
    n: usize,
    /// Its planes, among those of the grid.
    planes: Range<usize>,
    data: Vec<f64>,
}

impl Grid {
    /// Returns a grid of zeros.
    pub(crate) fn new(n: usize, planes: Range<usize>) -> Self {
        let data = vec![0.0; (n + 2) * (n + 2) * (planes.len() + 2)];
        Self { n, planes, data }
    }

    /// Sets all points to zero.
    pub(crate) fn clear(&mut self) {
        self.data.fill(0.0);
    }

    /// Returns the range of these planes in the grid.
    pub(crate) fn planes(&self) -> Range<usize> {
        self.planes.clone()
    }

    /// Returns the number of points of a plane, those on its borders included.
    fn area(&self) -> usize {
        (self.n + 2) * (self.n + 2)
    }

    /// Returns a row, borders included: plane and row are counted from the borders, which are 0.
    fn row(&self, plane: usize, row: usize) -> &[f64] {
        let start = plane * self.area() + row * (self.n + 2);
        &self.data[start..start + self.n + 2]
    }

    fn row_mut(&mut self, plane: usize, row: usize) -> &mut [f64] {
        let start = plane * self.area() + row * (self.n + 2);
        let end = start + self.n + 2;
        &mut self.data[start..end]
    }

    /// Sets one point, if it is in one of these planes. Borders stay.
    pub(crate) fn set(&mut self, [x, y, z]: [usize; 3], value: f64) {
        if self.planes.contains(&z) {
            let plane = z - self.planes.start + 1;
            self.row_mut(plane, y + 1)[x + 1] = value;
        }
    }

    /// Returns the planes without those that border them.
    pub(crate) fn own(&self) -> &[f64] {
        let area = self.area();
        &self.data[area..area * (self.planes.len() + 1)]
    }

    /// Replaces the planes by others in the format of [`Self::own`], of the same size, and closes the grid around them,
    /// which must be a whole one.
    pub(crate) fn replace(&mut self, own: &[f64]) {
        let area = self.area();
        self.data[area..area + own.len()].copy_from_slice(own);
        self.close_planes();
    }

    /// Sets the borders to periodic ones: copies of the opposite side.
    pub(crate) fn close(&mut self, member: &Member<'_, f64>) -> Result<(), ExchangeError> {
        let (n, area, count) = (self.n, self.area(), self.planes.len());
        for plane in self.data[area..area * (count + 1)].chunks_exact_mut(area) {
            for row in plane[n + 2..area - (n + 2)].chunks_exact_mut(n + 2) {
                row[0] = row[n];
                row[n + 1] = row[1];
            }
            plane.copy_within((n + 2) * n..(n + 2) * (n + 1), 0);
            plane.copy_within(n + 2..2 * (n + 2), (n + 2) * (n + 1));
        }
        if count == n {
            self.close_planes();
        } else {
            let [before, after] = member.ring(&self.own()[..area], &self.own()[area * (count - 1)..])?;
            self.data[..area].copy_from_slice(&before);
            self.data[area * (count + 1)..].copy_from_slice(&after);
        }
        Ok(())
    }

    /// Copies the planes that border a whole grid from its own planes at the other end.
    fn close_planes(&mut self) {
        let (area, count) = (self.area(), self.planes.len());
        self.data.copy_within(area * count..area * (count + 1), 0);
        self.data.copy_within(area..2 * area, area * (count + 1));
    }

    /// Adds an operator's result on another grid of the same size to this one. Borders are closed.
    pub(crate) fn add(
        &mut self,
        weights: Weights,
        other: &Self,
        member: &Member<'_, f64>,
    ) -> Result<(), ExchangeError> {
        self.add_to(None, weights, other);
        self.close(member)
    }

    /// Sets this grid to the sum of a grid and an operator's result on another, all of the same size. Borders are
    /// closed.
    pub(crate) fn set_to_sum(
        &mut self,
        start: &Self,
        weights: Weights,
        other: &Self,
        member: &Member<'_, f64>,
    ) -> Result<(), ExchangeError> {
        self.add_to(Some(start), weights, other);
        self.close(member)
    }

    fn add_to(&mut self, start: Option<&Self>, weights: Weights, other: &Self) {
        let mut around = RowSums::new(self.n);
        for plane in 1..=self.planes.len() {
            for row in 1..=self.n {
                let points = around.row(other, plane, row, weights);
                let own = self.row_mut(plane, row);
                if let Some(start) = start {
                    own.copy_from_slice(start.row(plane, row));
                }
                own[1..].iter_mut().zip(points).for_each(|(own, point)| *own += point);
            }
        }
    }

    /// Sets this grid to the restriction of a grid twice as fine: every second point of an operator's result on that.
    /// Borders are closed.
    pub(crate) fn restrict(
        &mut self,
        weights: Weights,
        fine: &Self,
        member: &Member<'_, f64>,
    ) -> Result<(), ExchangeError> {
        let mut around = RowSums::new(fine.n);
        for plane in 1..=self.planes.len() {
            for row in 1..=self.n {
                // The second of two points of the fine grid is the one where the coarse grid has one.
                let points = around.row(fine, 2 * plane, 2 * row, weights).skip(1).step_by(2);
                self.row_mut(plane, row)[1..].iter_mut().zip(points).for_each(|(own, point)| *own = point);
            }
        }
        self.close(member)
    }

    /// Adds the trilinear interpolation of a grid half as fine, borders included.
    pub(crate) fn interpolate(&mut self, coarse: &Self) {
        let mut between = vec![0.0; coarse.n + 2];
        for plane in 0..self.planes.len() + 2 {
            // The coarse grid may begin elsewhere: it may be whole where this one is not.
            let place = plane + self.planes.start;
            let planes = [place / 2, place.div_ceil(2)].map(|place| place - coarse.planes.start);
            for row in 0..self.n + 2 {
                let rows = [row / 2, row.div_ceil(2)];
                // Where the point is on a coarse row, or plane, both of a pair are the same.
                add_four(
                    &mut between,
                    [
                        coarse.row(planes[0], rows[0]),
                        coarse.row(planes[0], rows[1]),
                        coarse.row(planes[1], rows[0]),
                        coarse.row(planes[1], rows[1]),
                    ],
                );
                let pairs = self.row_mut(plane, row).as_chunks_mut::<2>().0;
                for ([on, after], [here, next]) in pairs.iter_mut().zip(between.array_windows()) {
                    *on += 0.25 * here;
                    *after += 0.125 * (here + next);
                }
            }
        }
    }

    /// Returns the sum of the squares of the points in its planes.
    pub(crate) fn square(&self) -> f64 {
        let mut sum = 0.0;
        for plane in 1..=self.planes.len() {
            for row in 1..=self.n {
                sum += self.row(plane, row)[1..=self.n].iter().map(|point| point * point).sum::<f64>();
            }
        }
        sum
    }
}

/// Sums of the rows around a row: an operator uses each of them up to three times.
struct RowSums {
    /// Sums of the four rows that are next to it in its plane, or in the next plane.
    near: Vec<f64>,
    /// Sums of the four rows that are across from it.
    far: Vec<f64>,
}

impl RowSums {
    fn new(n: usize) -> Self {
        Self { near: vec![0.0; n + 2], far: vec![0.0; n + 2] }
    }

    /// Returns an operator's results for the points of a row, without those on the borders.
    fn row<'a>(
        &'a mut self,
        grid: &'a Grid,
        plane: usize,
        row: usize,
        weights: Weights,
    ) -> impl Iterator<Item = f64> {
        let rows = |places: [[usize; 2]; 4]| places.map(|[plane, row]| grid.row(plane, row));
        add_four(
            &mut self.near,
            rows([[plane, row - 1], [plane, row + 1], [plane - 1, row], [plane + 1, row]]),
        );
        add_four(
            &mut self.far,
            rows([[plane - 1, row - 1], [plane - 1, row + 1], [plane + 1, row - 1], [plane + 1, row + 1]]),
        );
        let [point, face, edge, corner] = weights;
        let rows =
            grid.row(plane, row).array_windows().zip(self.near.array_windows()).zip(self.far.array_windows());
        rows.map(move |(([left, own, right], [near_left, near, near_right]), [far_left, far, far_right])| {
            point * own
                + face * (left + right + near)
                + edge * (near_left + near_right + far)
                + corner * (far_left + far_right)
        })
    }
}

fn add_four(sum: &mut [f64], rows: [&[f64]; 4]) {
    let [a, b, c, d] = rows.map(|row| &row[..sum.len()]);
    for (index, sum) in sum.iter_mut().enumerate() {
        *sum = a[index] + b[index] + c[index] + d[index];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::team;

    /// Returns a grid whose points contain their positions.
    fn numbered(n: usize, planes: Range<usize>) -> Grid {
        let mut grid = Grid::new(n, planes);
        for z in 0..n {
            for y in 0..n {
                for x in 0..n {
                    grid.set([x, y, z], value([x, y, z]));
                }
            }
        }
        grid
    }

    fn value([x, y, z]: [usize; 3]) -> f64 {
        (x + 10 * y + 100 * z) as f64
    }

    /// Visits every point of a grid, also on its borders: its place in the periodic grid, and its value.
    fn each(grid: &Grid, mut look: impl FnMut([usize; 3], f64)) {
        let n = grid.n;
        for plane in 0..grid.planes.len() + 2 {
            for row in 0..n + 2 {
                for (x, &found) in grid.row(plane, row).iter().enumerate() {
                    look([x, row, grid.planes.start + plane].map(|place| (place + n - 1) % n), found);
                }
            }
        }
    }

    #[test]
    fn borders_are_copies_of_the_opposite_side() {
        for threads in [1, 2, 3] {
            team::run(threads, None, |member| {
                let mut grid = numbered(8, member.range(8));
                grid.close(member)?;
                each(&grid, |place, found| assert_eq!(found.to_bits(), value(place).to_bits(), "{place:?}"));
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn an_operator_weighs_27_points() {
        let weights = [1000.0, 100.0, 10.0, 1.0];
        for threads in [1, 2, 3] {
            team::run(threads, None, |member| {
                let mut other = Grid::new(8, member.range(8));
                other.set([0, 7, 3], 1.0);
                other.close(member)?;
                let mut grid = Grid::new(8, member.range(8));
                grid.add(weights, &other, member)?;
                each(&grid, |place, found| {
                    let steps =
                        [(place[0], 0), (place[1], 7), (place[2], 3)].map(|(a, b): (usize, usize)| {
                            let distance = a.abs_diff(b);
                            distance.min(8 - distance)
                        });
                    let near = steps.iter().all(|&step| step <= 1);
                    let expected = if near { weights[steps.iter().sum::<usize>()] } else { 0.0 };
                    assert_eq!(found.to_bits(), expected.to_bits(), "{place:?}");
                });
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn restriction_and_interpolation_keep_constants() {
        team::run(2, None, |member| {
            let fill = |grid: &mut Grid| grid.data.fill(2.0);
            let coarse_planes = member.range(4);
            let mut fine = Grid::new(8, 2 * coarse_planes.start..2 * coarse_planes.end);
            fill(&mut fine);
            let mut coarse = Grid::new(4, coarse_planes);
            coarse.restrict([0.5, 0.25, 0.125, 0.0625], &fine, member)?;
            each(&coarse, |place, found| assert_eq!(found.to_bits(), 8.0_f64.to_bits(), "{place:?}"));
            fine.interpolate(&coarse);
            each(&fine, |place, found| assert_eq!(found.to_bits(), 10.0_f64.to_bits(), "{place:?}"));
            Ok(())
        })
        .unwrap();
    }
}
