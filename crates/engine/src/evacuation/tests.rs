//! Evacuations of small fleets whose right course is plain; a simulation with failures is below.

mod agents;
mod deadlines;
mod failures;
mod fleet;
mod moves;
mod planted;
mod restarts;
mod returns;
mod rooms;
mod simulation;
mod world;
