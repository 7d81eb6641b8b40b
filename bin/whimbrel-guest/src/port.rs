//! The port of virtio-serial, and the answers sent there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::give_back::give_back;
use crate::pages::{KernelMemory, PageUse};
use crate::protocol::{Kind, LINE_BYTES, Line, PORT, Ranges, Request, VERSION};

/// Pause between reads while the host's end is not open: reading then ends at once.
const CLOSED_PAUSE: Duration = Duration::from_millis(250);

/// Finds the device of the port [`PORT`]: by the name from udev, or, without udev, by the kernel's list of its ports.
/// `root` is `/` except in tests.
///
/// # Errors
/// Fails if there is none; the error contains advice.
pub fn find(root: &Path) -> io::Result<PathBuf> {
    let named = root.join("dev/virtio-ports").join(PORT);
    if named.exists() {
        return Ok(named);
    }
    let ports = root.join("sys/class/virtio-ports");
    for port in fs::read_dir(&ports).into_iter().flatten().flatten() {
        if fs::read_to_string(port.path().join("name")).is_ok_and(|name| name.trim() == PORT) {
            return Ok(root.join("dev").join(port.file_name()));
        }
    }
    let error = format!(
        "there is no port {PORT}: add one to the VM (-device virtserialport,name={PORT},chardev=...), and \
         load the module virtio_console"
    );
    Err(io::Error::new(io::ErrorKind::NotFound, error))
}

/// Answers at a device until it is gone.
///
/// # Errors
/// Fails if the device cannot be opened, or is unplugged.
pub fn serve(root: &Path, device: &Path) -> io::Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(device)?;
    let mut questions = BufReader::new(port.try_clone()?);
    loop {
        match serve_requests(root, &mut questions, &port) {
            // The host's end was closed, possibly before everything was read.
            Ok(()) => thread::sleep(CLOSED_PAUSE),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => thread::sleep(CLOSED_PAUSE),
            Err(error) => return Err(error),
        }
    }
}

/// Answers all requests that can be read.
///
/// # Errors
/// Fails if reading or writing fails.
pub fn serve_requests(root: &Path, questions: &mut impl BufRead, to: &File) -> io::Result<()> {
    let mut line = Vec::new();
    loop {
        line.clear();
        // A line longer than any request is read in pieces, none of which is a request.
        let read = io::Read::take(&mut *questions, LINE_BYTES as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        let question = std::str::from_utf8(&line).ok().and_then(|line| line.trim().parse().ok());
        if let Some(question) = question {
            let mut out = BufWriter::with_capacity(1 << 16, to);
            answer(root, question, &mut out)?;
            out.flush()?;
        }
    }
}

/// Answers a request.
///
/// # Errors
/// Fails if writing fails. Failures of the kernel are reported in the answer.
pub fn answer(root: &Path, question: Request, out: &mut impl Write) -> io::Result<()> {
    let Request { id, .. } = question;
    writeln!(out, "{}", Line::Begin { id, version: VERSION })?;
    let failed = |what: &str, error: &io::Error, out: &mut dyn Write| {
        let text: String = format!("{what}: {error}").replace('\n', " ").chars().take(1000).collect();
        writeln!(out, "{}", Line::Note(text))
    };
    match KernelMemory::open(root) {
        Err(error) => failed("the use of memory is unknown", &error, out)?,
        Ok(kernel) => {
            if question.give_back
                && let Err(error) = give_back(root, &kernel, question.cache)
            {
                failed("the page cache is not freed", &error, out)?;
            }
            if let Err(error) = write_pages(&kernel, question, out)? {
                failed("the use of some memory is unknown", &error, out)?;
            }
        }
    }
    writeln!(out, "{}", Line::End { id })
}

/// Writes the kernel's record of memory. The outer error is one of writing.
fn write_pages(kernel: &KernelMemory, question: Request, out: &mut impl Write) -> io::Result<io::Result<()>> {
    let mut memory = Ranges::new(Kind::Memory);
    let mut lines: Vec<_> = kernel.memory().iter().filter_map(|range| memory.add(range.clone())).collect();
    lines.extend(memory.finish());
    if kernel.poisoned() {
        lines.push(Line::Poisoned.to_string());
    }
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    let (mut free, mut cache) = (Ranges::new(Kind::Free), Ranges::new(Kind::Cache));
    let mut unwritten = None;
    let scanned = kernel.scan(|pages, used| {
        let full = match used {
            PageUse::Free => free.add(pages),
            // After reclaim there is no page that could be reclaimed.
            used if !question.give_back && used.is_cache(question.cache) => cache.add(pages),
            _ => None,
        };
        let written = full.map_or(Ok(()), |line| writeln!(out, "{line}"));
        written.map_err(|error| {
            let copy = io::Error::from(error.kind());
            unwritten = Some(error);
            copy
        })
    });
    if let Some(error) = unwritten {
        return Err(error);
    }
    free.finish().into_iter().chain(cache.finish()).try_for_each(|line| writeln!(out, "{line}"))?;
    Ok(scanned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for directory in
            ["proc/sys/vm", "dev", "sys/class/virtio-ports/vport1p1", "sys/class/virtio-ports/vport1p2"]
        {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        let put = |name: &str, text: &[u8]| fs::write(root.path().join(name), text).unwrap();
        put("proc/iomem", b"00001000-00005fff : System RAM\n");
        put("proc/cmdline", b"quiet\n");
        let cache: u64 = 1 << 5 | 1 << 3;
        let flags = [0, 1 << 10, 1 << 10, cache, 0, cache | 1 << 6];
        put("proc/kpageflags", &flags.iter().flat_map(|flags: &u64| flags.to_le_bytes()).collect::<Vec<_>>());
        put("proc/cmdline", b"quiet");
        put("sys/class/virtio-ports/vport1p1/name", b"com.example\n");
        root
    }

    fn reply(root: &Path, question: &str) -> String {
        let mut out = Vec::new();
        answer(root, question.parse().unwrap(), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn questions_are_answered() {
        let root = root();
        let path = root.path();
        assert_eq!(reply(path, "report 7 none"), "begin 7 1\nmemory 1+5\nfree 1+2\nend 7\n");
        assert_eq!(reply(path, "report 8 cold"), "begin 8 1\nmemory 1+5\nfree 1+2\ncache 3+1\nend 8\n");
        assert_eq!(reply(path, "report 9 all"), "begin 9 1\nmemory 1+5\nfree 1+2\ncache 3+1 5+1\nend 9\n");
        let failed = reply(path, "give-back 10 all");
        assert!(failed.starts_with("begin 10 1\nnote the page cache is not freed: "), "{failed}");
        assert!(failed.ends_with("memory 1+5\nfree 1+2\nend 10\n"), "{failed}");
        fs::write(path.join("proc/sys/vm/drop_caches"), "").unwrap();
        assert_eq!(reply(path, "give-back 10 all"), "begin 10 1\nmemory 1+5\nfree 1+2\nend 10\n");
        fs::write(path.join("proc/cmdline"), "page_poison=1").unwrap();
        assert!(reply(path, "report 1 none").contains("\npoisoned\n"));
        fs::write(path.join("proc/kpageflags"), [0; 24]).unwrap();
        assert!(reply(path, "report 1 none").contains("\nnote the use of some memory is unknown: "));
        fs::remove_file(path.join("proc/kpageflags")).unwrap();
        assert!(reply(path, "report 1 none").starts_with("begin 1 1\nnote the use of memory is unknown: "));
    }

    #[test]
    fn what_is_no_question_is_passed_over() {
        let root = root();
        let noise = [&b"hello\nreport 1\n"[..], &[b'x'; 10_000], b"\n\xff\xfe\nreport 2 none\n", b"report 3"]
            .concat();
        let answers = tempfile::tempfile().unwrap();
        serve_requests(root.path(), &mut &noise[..], &answers).unwrap();
        let reply = io::read_to_string({
            io::Seek::rewind(&mut &answers).unwrap();
            answers
        });
        assert_eq!(reply.unwrap(), "begin 2 1\nmemory 1+5\nfree 1+2\nend 2\n");
    }

    #[test]
    fn the_port_is_found_by_its_name() {
        let root = root();
        let path = root.path();
        assert!(find(path).unwrap_err().to_string().contains("virtserialport"));
        fs::write(path.join("sys/class/virtio-ports/vport1p2/name"), format!("{PORT}\n")).unwrap();
        assert_eq!(find(path).unwrap(), path.join("dev/vport1p2"));
        fs::create_dir_all(path.join("dev/virtio-ports")).unwrap();
        fs::write(path.join("dev/virtio-ports").join(PORT), "").unwrap();
        assert_eq!(find(path).unwrap(), path.join("dev/virtio-ports").join(PORT));
    }
}
