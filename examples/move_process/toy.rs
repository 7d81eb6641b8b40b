//! The toy: a process whose whole state is in one region of memory, and that knows what every word of it must be.
//!
//! It counts steps. The first page holds the number of the last step, and step `n` writes a value that only `n` has to
//! every word of one other page. So the number of steps determines all of the memory, and a toy that is started on the
//! memory of another one can check it before it goes on.

use std::error::Error;
use std::os::unix::process::parent_id;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

/// Pages beside that of the step number, 64 MiB, and those of them that most steps write.
pub(crate) const PAGES: u64 = 16 * 1024;
const HOT_PAGES: u64 = 2 * 1024;
/// Number of steps between two pauses; the last one of them writes any page.
const BURST: u64 = 64;

/// One page. Its words are atomic because other processes read and write them, too.
#[repr(align(4096))]
struct Page([AtomicU64; 512]);

/// Runs the toy: prints the address of its memory, waits for a line of input, checks the memory that it finds then,
/// prints the number of steps in it, and goes on from there until its parent has ended.
pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    let parent = parent_id();
    let pages: Vec<Page> = (0..=PAGES).map(|_| Page([const { AtomicU64::new(0) }; 512])).collect();
    println!("{}", pages.as_ptr() as u64);
    std::io::stdin().read_line(&mut String::new())?;

    let found = pages[0].0[0].load(SeqCst);
    // The stop may have cut a step in two. Doing that step again completes it.
    step(&pages, found + 1);
    check(&pages, found + 1)?;
    println!("{found}");
    for number in found + 2.. {
        step(&pages, number);
        // Once all pages are written, the rate of writes is one that rounds can keep up with.
        if number > PAGES && number.is_multiple_of(BURST) {
            thread::sleep(Duration::from_millis(1));
            if parent_id() != parent {
                break;
            }
        }
    }
    Ok(())
}

fn step(pages: &[Page], number: u64) {
    for (index, word) in (1..).zip(&pages[page_of(number)].0) {
        word.store(number * index, SeqCst);
    }
    pages[0].0[0].store(number, SeqCst);
}

/// Returns the page that a step writes: each page in turn at first, and mostly hot pages later.
fn page_of(step: u64) -> usize {
    let page = match step {
        1..=PAGES => step - 1,
        _ if step.is_multiple_of(BURST) => step / BURST % PAGES,
        _ => step % HOT_PAGES,
    };
    1 + page as usize
}

/// Compares all pages with what the steps up to `last` have written.
fn check(pages: &[Page], last: u64) -> Result<(), String> {
    let mut last_step_of = vec![0; pages.len()];
    (1..=last).for_each(|step| last_step_of[page_of(step)] = step);
    for (page, step) in last_step_of.into_iter().enumerate().skip(1) {
        if !(1..).zip(&pages[page].0).all(|(index, word)| word.load(SeqCst) == step * index) {
            return Err(format!("page {page} does not hold what step {step} of {last} wrote"));
        }
    }
    Ok(())
}
