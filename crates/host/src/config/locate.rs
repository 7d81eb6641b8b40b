//! Mapping between positions in the text and keys.

use toml::de::{DeTable, DeValue};

/// Lines and keys of one configuration's text.
#[derive(Debug, Default)]
pub(super) struct Locator {
    text: String,
}

impl Locator {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into() }
    }

    /// Returns the line of a byte, from 1 on.
    pub(super) fn line_at(&self, offset: usize) -> usize {
        // Offsets of the parser are between characters; any other offset does not come from the parser.
        1 + self.text.get(..offset).unwrap_or(&self.text).matches('\n').count()
    }

    /// Returns the line of a key, or of the nearest table around it; line 1 if there is none.
    pub(super) fn line_of(&self, key: &[&str]) -> usize {
        let Ok(root) = DeTable::parse(&self.text) else { return 1 };
        let mut table = root.into_inner();
        let mut offset = 0;
        for part in key {
            let Some((name, value)) = table.into_iter().find(|(name, _)| name.get_ref() == part) else {
                break;
            };
            offset = name.span().start;
            match value.into_inner() {
                DeValue::Table(inner) => table = inner,
                _ => break,
            }
        }
        self.line_at(offset)
    }

    /// Returns a host whose name has dots and no quotes, so that it is read as tables within tables.
    pub(super) fn host_with_dots(&self) -> Option<&str> {
        let headings =
            self.text.lines().filter_map(|line| line.trim().strip_prefix("[hosts.")?.strip_suffix(']'));
        headings.map(str::trim).find(|name| name.contains('.') && !name.contains(['"', '\'']))
    }

    /// Returns the key, as `table.key`, that has a byte in its name or value; empty if there is none.
    pub(super) fn key_at(&self, offset: usize) -> String {
        let Ok(root) = DeTable::parse(&self.text) else { return String::new() };
        let mut path = Vec::new();
        let mut table = root.into_inner();
        loop {
            let here = |(name, value): &(toml::Spanned<_>, toml::Spanned<DeValue<'_>>)| {
                name.span().contains(&offset)
                    || value.span().contains(&offset)
                    || holds(value.get_ref(), offset)
            };
            let Some((name, value)) = table.into_iter().find(here) else { break };
            path.push(name.get_ref().to_string());
            match value.into_inner() {
                DeValue::Table(inner) if !name.span().contains(&offset) => table = inner,
                _ => break,
            }
        }
        path.join(".")
    }
}

/// True if a byte is in something inside a value; a table's own span is its heading alone.
fn holds(value: &DeValue<'_>, offset: usize) -> bool {
    let DeValue::Table(table) = value else { return false };
    table.iter().any(|(name, value)| {
        name.span().contains(&offset) || value.span().contains(&offset) || holds(value.get_ref(), offset)
    })
}
