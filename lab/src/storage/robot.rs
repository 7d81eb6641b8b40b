//! A reader of a bulletin board, as in Bradford et al. 2007, section 4.3.2: follows links here and there, and sometimes
//! writes a post.

use std::io;
use std::time::Duration;

use crate::http::Connection;

/// The front page of the board.
const FRONT: &str = "/board/forum";
const THREAD: &str = "/board/forumpost/";
/// Visits for each post: 5% of visits are posts.
const VISITS_OF_A_POST: u64 = 20;
/// Average time from an answer to the next request: 250 readers request a dozen pages a second. Under TCG the guest can
/// make some thirty, so that it is busy, and has spare time: its processor is not the only limit measured.
const THINK: Duration = Duration::from_secs(20);

/// Random numbers that are the same in each run (splitmix64).
#[derive(Debug, Clone)]
pub(super) struct BoardRandom(u64);

impl BoardRandom {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number less than `sides`.
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % sides.max(1)
    }
}

/// Outcome of a visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Visit {
    /// A page was read.
    Read,
    /// A post was accepted.
    Posted,
    /// The board refused the request.
    Refused,
}

/// A reader with a memory for links.
#[derive(Debug)]
pub(super) struct Robot {
    number: u64,
    dice: BoardRandom,
    links: Vec<String>,
    posts: u64,
}

impl Robot {
    pub(super) fn new(number: u64) -> Self {
        Self { number, dice: BoardRandom::new(number), links: Vec::new(), posts: 0 }
    }

    /// Returns the time for reading the last page: anything up to twice the average.
    pub(super) fn thinks(&mut self) -> Duration {
        Duration::from_millis(self.dice.roll(2 * THINK.as_millis() as u64))
    }

    /// Reads a page, or writes a post; `piece` receives the number of bytes on arrival.
    pub(super) fn visit(
        &mut self,
        connection: &mut Connection,
        mut piece: impl FnMut(usize),
    ) -> io::Result<Visit> {
        let is_post = self.dice.roll(VISITS_OF_A_POST) == 0;
        let head = if is_post {
            self.posts += 1;
            let (number, post) = (self.number, self.posts);
            let words = "+and+so+on".repeat(40);
            let form = format!(
                "title=Reader+{number}&mimetype=text/x-markdown&submit=Submit&content=Post+{post}{words}"
            );
            // The board accepts forms from its own pages only.
            let headers = "Referer: http://lab/board/forumnew\r\n\
                           Content-Type: application/x-www-form-urlencoded\r\n";
            connection.ask("POST", "/board/forume1", headers, &form)?
        } else {
            connection.ask("GET", &self.next_page(), "", "")?
        };
        let mut page = Vec::new();
        connection.read_body(&head, |bytes| {
            piece(bytes.len());
            page.extend_from_slice(bytes);
        })?;
        let is_there = head.location.as_ref().is_some_and(|location| location.contains(THREAD));
        Ok(match (head.status, is_post) {
            (302, true) if is_there => Visit::Posted,
            (200, false) => {
                self.links = links(&String::from_utf8_lossy(&page));
                Visit::Read
            }
            _ => {
                self.links.clear();
                Visit::Refused
            }
        })
    }

    fn next_page(&mut self) -> String {
        // A thread has few links; back to the front page now and then.
        let choices = self.links.len() as u64 + 1;
        let choice = self.dice.roll(choices) as usize;
        self.links.get(choice).cloned().unwrap_or_else(|| FRONT.to_owned())
    }
}

/// Returns the threads to which a page links.
fn links(page: &str) -> Vec<String> {
    let hash = |rest: &str| rest.chars().take_while(char::is_ascii_hexdigit).collect::<String>();
    let found = page.match_indices(THREAD).map(|(at, _)| hash(&page[at + THREAD.len()..]));
    let mut links: Vec<_> =
        found.filter(|hash| !hash.is_empty()).map(|hash| format!("{THREAD}{hash}")).collect();
    links.sort_unstable();
    links.dedup();
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_threads_are_found_once() {
        let page = r#"<a href="/board/forumpost/88a10509f7">x</a> <a href='/board/forumpost/01?t=h'>
                      <a href="/board/forumpost/88a10509f7"> /board/forumpost/ /forum"#;
        assert_eq!(links(page), ["/board/forumpost/01", "/board/forumpost/88a10509f7"]);
        assert_eq!(links(""), [""; 0]);
    }

    #[test]
    fn dice_are_even_and_the_same_in_each_run() {
        let roll = |seed| {
            let mut dice = BoardRandom::new(seed);
            (0..10_000).map(|_| dice.roll(20)).collect::<Vec<_>>()
        };
        assert_eq!(roll(1), roll(1));
        assert_ne!(roll(1), roll(2));
        let posts = roll(7).iter().filter(|side| **side == 0).count();
        assert!((400..600).contains(&posts), "{posts}");
    }
}
