//! Victim of this crate's tests: a program that detects any change to it.
//!
//! Many threads each repeat one operation and check its result: registers, vector registers, system
//! calls that wait, signals, masks, stacks. The first deviation ends the program with a message and
//! an exit status of 1.
//!
//! Its protocol uses standard output and input. It prints `thread NAME NUMBER` for each of its
//! threads, then `ready`. On the line `count` it prints `NAME ROUNDS` for each, then `end`; on
//! `quit`, or the end of input, it checks once more and exits with status 0. With names as
//! arguments only those threads are started; `list` prints the names alone.
//!
//! A first argument that names one of [`modes::MODES`] selects a different program, such as a
//! process with memory to order.

#![allow(clippy::expect_used, clippy::panic, reason = "a program of the tests")]

mod calls;
mod memory;
mod modes;
mod registers;
mod signals;

use std::io::{BufRead, Write};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;

/// Operation that a thread repeats: one round, with a description of any deviation.
type Round = Box<dyn FnMut() -> Result<(), String>>;
/// Prepares a thread, inside it.
type Prepare = fn() -> Round;

struct Worker {
    name: &'static str,
    rounds: AtomicU64,
    thread: AtomicU64,
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if let Some((_, mode)) =
        modes::MODES.iter().find(|(name, _)| wanted.first().is_some_and(|one| one == name))
    {
        return mode(&wanted[1..]);
    }
    let all: Vec<(&'static str, Prepare)> = [registers::WORKERS, calls::WORKERS, signals::WORKERS].concat();
    let stop = Arc::new(AtomicBool::new(false));
    signals::prepare_process();
    std::panic::set_hook(Box::new(|panic| fail(&panic.to_string())));
    let mut workers = Vec::new();
    let (ended, ends) = channel();
    if wanted.first().is_some_and(|one| one == "list") {
        for (name, _) in all {
            println!("thread {name} 0");
        }
        return modes::stay();
    }
    for (name, prepare) in all {
        if !wanted.is_empty() && !wanted.iter().any(|one| one == name) {
            continue;
        }
        let worker = Arc::new(Worker { name, rounds: AtomicU64::new(0), thread: AtomicU64::new(0) });
        workers.push(worker.clone());
        let (stop, ended) = (stop.clone(), ended.clone());
        thread::spawn(move || {
            work(&worker, prepare, &stop);
            // Other threads still send it signals and data: it stays until the whole program ends.
            signals::block_all();
            let _ = ended.send(());
            loop {
                thread::park();
            }
        });
    }
    for worker in &workers {
        while worker.rounds.load(Ordering::Acquire) == 0 {
            thread::yield_now();
        }
        println!("thread {} {}", worker.name, worker.thread.load(Ordering::Relaxed));
    }
    println!("thread main {}", std::process::id());
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        match line.as_deref() {
            Ok("count") => {
                for worker in &workers {
                    println!("{} {}", worker.name, worker.rounds.load(Ordering::Relaxed));
                }
                println!("end");
            }
            _ => break,
        }
    }
    stop.store(true, Ordering::Relaxed);
    for _ in workers {
        let _ = ends.recv();
    }
    println!("well");
}

fn work(worker: &Worker, prepare: Prepare, stop: &AtomicBool) {
    signals::prepare_thread();
    let before = signals::Settings::now();
    let mut round = prepare();
    let settings = signals::Settings::now();
    if settings.stack_differs(&before) && worker.name != "alternate-stack" {
        fail("the alternate stack is not what it was");
    }
    worker.thread.store(u64::from(nix::unistd::gettid().as_raw() as u32), Ordering::Relaxed);
    while !stop.load(Ordering::Relaxed) {
        if let Err(problem) = round() {
            fail(&format!("{}: {problem}", worker.name));
        }
        let now = signals::Settings::now();
        if now != settings {
            fail(&format!("{}: signal mask or stack {now:?}, expected {settings:?}", worker.name));
        }
        worker.rounds.fetch_add(1, Ordering::Release);
    }
}

/// Ends the program with a message.
fn fail(problem: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "victim: {problem}");
    exit(1);
}
